"""CLI; ranks from torchrun, mpirun or SLURM; batch-script rendering."""
