"""How duels move reputations: the paper's rule and its alternatives, and judges' agreement with their panels."""
