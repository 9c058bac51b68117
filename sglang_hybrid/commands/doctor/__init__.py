"""``sglang-hybrid doctor``: check and measure this machine, and say what to change.

report       what a check finds, and all findings together: as JSON and as an exit status
machine      where checks read the machine; tests describe other machines
gpu_query    GPUs as nvidia-smi describes them
cpu          checks of CPU kernels, cores and NUMA nodes
memory       checks of memory, /dev/shm, huge pages, limits, and the bandwidth of memory
gpu          checks of driver, PCIe, the GPU's NUMA node and CUDA kernels
software     checks of versions, settings, hooks and the CPU library
examine      the table of checks, run one after the other
main         command line and what a person sees
"""
