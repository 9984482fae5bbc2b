"""Turns a source of data into TFRecord shards beside a manifest, in parallel; TensorFlow is in Dask workers alone."""
