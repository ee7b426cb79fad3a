from triton.backends import driver

from triton_interpreter_cpu import concrete

InterpreterDriver = concrete(driver.DriverBase, is_active=classmethod(lambda cls: True), __init__=lambda self: None)
