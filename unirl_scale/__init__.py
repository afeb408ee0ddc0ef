"""UniRL-Scale: actor-critic RL training whose bits do not depend on the parallel layout."""

__version__ = "0.1.0"
