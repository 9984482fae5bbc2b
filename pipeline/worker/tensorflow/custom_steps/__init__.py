"""Models whose steps are their own: built, made on every replica, and logged, as Keras would on one device."""
