"""Room ``cut``: what is made once with the model, and frozen from then on."""
