"""What the dry run's model says, beside what was measured."""
