"""A model's layers laid over the devices that share each copy of it: variables, forward, backward and updates.

`plan.division` says where each layer goes, `place` puts it and all else that a step computes there, and `listing` asks
the graph whether it is there.
"""
