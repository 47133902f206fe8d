"""A task small enough to be learned in a minute on two cores: writing six letters backwards."""
