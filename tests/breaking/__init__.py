"""What tests/chaos.py is made of: a training whose processes can be found and killed, kills, faults, and what must
hold afterwards.
"""
