"""The algorithms as pure maths on tensors. Sees neither comm nor parallel."""
