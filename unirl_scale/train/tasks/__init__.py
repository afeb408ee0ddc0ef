"""What the model is asked, and how its answers are judged."""
