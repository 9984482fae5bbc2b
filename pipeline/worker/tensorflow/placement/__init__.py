"""A model's layers laid over the devices that share each copy of it: variables, forward, backward and updates.

`units` says what is placed as a whole, `plan.balance` where, `place` puts it there, `following` has all else that a
step computes follow, and `listing` asks the graph whether it did.
"""
