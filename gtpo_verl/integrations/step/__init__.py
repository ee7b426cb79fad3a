"""What the trainer does in a step, a module for each concern; `gtpo_verl.integrations.trainer` calls them."""
