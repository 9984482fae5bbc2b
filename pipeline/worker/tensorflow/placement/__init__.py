"""A model's layers laid over the devices that share each copy of it: variables, forward, backward and updates.

`plan.balance` says where each layer goes, `place` puts it there, `following` places all else that a step computes, and
`listing` asks the graph whether it is there.
"""
