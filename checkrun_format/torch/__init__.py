"""Trainers in torch: find tables and their optimizer state, record which rows change, save and restore."""
