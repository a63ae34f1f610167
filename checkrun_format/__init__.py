"""checkrun-format: checkpoints of recommendation models, incremental and quantized, on Zarr v3."""
