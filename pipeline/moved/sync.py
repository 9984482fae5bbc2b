"""Answers `python -m pipeline.sync` with what to type now."""

from pipeline import moved

if __name__ == "__main__":
    moved.answer("sync")
