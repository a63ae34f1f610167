"""What `checkrun demo` is made of: a text, a model, a trainer, a worker process, a folder and a report."""
