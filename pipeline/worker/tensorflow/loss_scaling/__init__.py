"""What makes several replicas train what one device trains: losses, metrics, statistics brought to one rule."""
