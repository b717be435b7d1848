"""Commands of `kvasir`, one module each, with `main(settings) -> exit code`. `bench` parses its own arguments.

`service.cli` imports a module only after it has parsed the flags, because importing torch takes seconds.
"""
