"""What was asked, who is where, what was sampled. Imports no torch."""
