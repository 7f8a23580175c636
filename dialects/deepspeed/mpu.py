"""The mesh in the words that DeepSpeed asks a model-parallel unit (mpu) in."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from partbook.core import Mesh


class MeshUnit:
    """What DeepSpeed 0.19 calls on an mpu: data-parallel and tensor-parallel groups, sizes and ranks.

    It has no ``initialize_sequence_parallel`` and no ``get_sequence_*``: DeepSpeed takes their presence for Ulysses.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return self.mesh.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return next(ranks for ranks in self.mesh.rank_groups("dp") if self.mesh.rank in ranks)

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp_rank

    def get_model_parallel_group(self) -> ProcessGroup | None:
        return self.mesh.tp_group

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tp_rank

    # Megatron's names, then those of DeepSpeed's own pipeline grid
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_group = get_model_parallel_group
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_rank = get_model_parallel_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.mesh.pp
