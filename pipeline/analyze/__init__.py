"""Turns results into judgement: what was measured, what may be compared, what explains and predicts it."""
