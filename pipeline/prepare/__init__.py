"""Turns a source of data into TFRecord shards beside a manifest, in parallel: `python -m pipeline prepare`.

    filling.py    one step after another, until the folder has all shards and a manifest
    folder.py     the files of a folder while it is filled, its lock, and how many shards it gets
    cluster.py    Dask workers here or elsewhere, and the tasks that they are given
    work.py       the tasks of a Dask worker: describe the source, gather a stream, make a shard
    sources.py    the data of a data set's function as rows, each of which can be made a record, or as a stream
    values.py     the values of examples as features of records

Importing it imports nothing slow. TensorFlow is imported in a Dask worker alone, where the source needs it.
"""
