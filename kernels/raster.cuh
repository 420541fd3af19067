// Which output tile a block makes.
#pragma once

// Blocks that run at the same time should share rows of A and columns of B in L2: they walk down Group rows of tiles
// before they step to the next column, instead of along a whole row.
template <int Group, typename Index>
__device__ __forceinline__ void tile_of(Index block, Index tiles_m, Index tiles_n, Index& tile_m, Index& tile_n) {
    const Index group = block / (Group * tiles_n), within = block - group * (Group * tiles_n);
    const Index rows_left = tiles_m - group * Group;
    const Index rows = rows_left < Group ? rows_left : Group;
    tile_n = within / rows;
    tile_m = group * Group + (within - tile_n * rows);
}
