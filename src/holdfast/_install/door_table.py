"""Names the functions of torch's checkpoint package that ``install()`` replaces.

It imports nothing: every Python process with ``HOLDFAST_INSTALL=1`` reads it at its start.
"""

PACKAGE = "torch.distributed.checkpoint"

DOORS = {
    "state_dict_saver": ("save", "async_save", "save_state_dict", "_save_state_dict"),
    "state_dict_loader": ("load", "load_state_dict", "_load_state_dict", "_load_state_dict_from_keys"),
    "optimizer": ("load_sharded_optimizer_state_dict",),
    "format_utils": ("dcp_to_torch_save", "torch_save_to_dcp"),
    "_consolidate_hf_safetensors": (
        "consolidate_safetensors_files",
        "consolidate_safetensors_files_on_every_rank",
    ),
    "state_dict": (
        *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
        *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
        *("_patch_model_state_dict", "_patch_optimizer_state_dict"),
    ),
}
"""By module of torch's package, the functions that are replaced; ours have the same names."""

DOOR_MODULES = frozenset(f"{PACKAGE}.{module}" for module in DOORS)
