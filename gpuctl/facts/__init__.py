"""What is asked of a machine and how the answer is read: one file a subject, pure."""
