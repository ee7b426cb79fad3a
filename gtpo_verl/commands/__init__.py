"""The subcommands of ``gtpo-verl``, a module each; nothing imports them but the command line."""
