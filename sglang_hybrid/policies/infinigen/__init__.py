"""Policy ``infinigen``: InfiniGen (OSDI 2024), on this package's pool and prediction."""
