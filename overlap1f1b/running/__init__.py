"""Floor ``running``: what starts ranks and runs on them: train and bench, their model, text and link."""
