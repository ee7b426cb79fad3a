from triton.backends import compiler

from triton_interpreter_cpu import concrete

InterpreterBackend = concrete(
    compiler.BaseBackend, supports_target=staticmethod(lambda target: target.backend == "cpu")
)
