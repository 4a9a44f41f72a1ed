"""What users do around forward and backward, one function each."""
