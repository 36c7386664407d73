"""From a trained model to text: the search, the scores, the translator that feeds them, and how input lines are grouped."""
