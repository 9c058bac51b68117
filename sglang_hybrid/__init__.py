"""An attention backend for stock SGLang that keeps the KV cache in host memory.

Importing the package must stay free of side effects and of heavy imports: a CPU
host imports it at every interpreter start (see ``integration/cpu_host``).
"""

__version__ = "0.2.0"
