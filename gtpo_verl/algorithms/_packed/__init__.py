"""How a batch is laid out and worked through group by group, so that the methods read like their papers."""
