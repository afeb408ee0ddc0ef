"""The canonical tree, ordered collectives, topology, cost model, planner."""
