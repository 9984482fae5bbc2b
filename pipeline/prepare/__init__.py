"""Turns a source of data into TFRecord shards beside a manifest, in parallel: `python -m pipeline prepare`.

Importing it imports nothing slow. TensorFlow is imported in a Dask worker alone, where the source needs it.
"""
