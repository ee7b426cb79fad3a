"""Preparation of data sets: from the hub or from files to verl's schema, checked. Imports nothing heavy."""
