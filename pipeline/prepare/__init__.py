"""Turns a source of data into TFRecord shards beside a manifest, in parallel: `python -m pipeline prepare`.

    command.py    the command line, and an exit code
    settings.py   a config, checked, and the composition of it
    folder.py     what a folder of prepared data holds while it is made, and its lock
    layout.py     how many shards there are, and which example is in which: arithmetic
    sources.py    what a data set's function returned, as rows of which each can be made a record, or as a stream
    work.py       what a Dask worker does: describe the source, gather a stream, make a shard
    cluster.py    Dask workers here or elsewhere, and the tasks that they are given
    conduct.py    one step after another, and what is told of them

Importing it imports nothing slow. TensorFlow is imported in a Dask worker alone, where the source needs it.
"""
