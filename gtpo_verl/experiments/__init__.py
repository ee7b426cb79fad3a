"""Trainings on a Ray cluster elsewhere: what is carried there, Ray jobs, and what a job proves before it trains."""
