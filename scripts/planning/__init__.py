"""The parts of scripts/plan.py."""
