"""What stock SGLang needs on a host without a GPU and does not find on PyPI.

SGLang's CPU engine imports ``sgl_kernel``, of which PyPI has only CUDA builds, and
``torchvision``, whose PyPI wheel does not load beside a CPU build of torch. SGLang
imports both before it loads plugins, in every process it spawns, so the fix has to
be in place at interpreter start: ``install`` writes a ``.pth`` line into the virtual
environment that runs ``startup``. Only environments set up for CPU have that line.
"""
