// C (m, n) = A (m, k) B (k, n), bf16, row-major, accumulated in f32 and rounded once.
//
// Launch:  grid (n / 128, m / 128), 128 threads: 4 warps, each with 64 x 64 of C.
// Needs:   sm_80; m and n multiples of 128, k of 32; all pointers aligned to 16 bytes.
// Shared:  STAGES tiles of A (128 x 32) and B (32 x 128), filled by cp.async. Chunks of 16 bytes are swizzled by their
//          row, so that the 8 rows of an ldmatrix lie in 8 different groups of banks.

constexpr int BM = 128, BN = 128, BK = 32, STAGES = 3, THREADS = 128;
constexpr unsigned A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BK * BN * 2;

__device__ __forceinline__ unsigned a_place(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }
__device__ __forceinline__ unsigned b_place(int row, int chunk) { return row * 256 + ((chunk ^ (row & 7)) << 4); }

__device__ __forceinline__ void copy16(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void fill(unsigned stage, const unsigned short* a, const unsigned short* b, int n, int k, int k0) {
    int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < BM * BK / 8 / THREADS; i++) {
        int row = t / 4 + i * (THREADS / 4), chunk = t % 4;
        copy16(stage + a_place(row, chunk), a + (size_t)row * k + k0 + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < BK * BN / 8 / THREADS; i++) {
        int row = t / 16 + i * (THREADS / 16), chunk = t % 16;
        copy16(stage + A_BYTES + b_place(row, chunk), b + (size_t)(k0 + row) * n + chunk * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    matmul_tensor_core(unsigned short* c, const unsigned short* a, const unsigned short* b, int m, int n, int k) {
    __shared__ __align__(128) unsigned char tiles[STAGES * STAGE_BYTES];
    unsigned base = (unsigned)__cvta_generic_to_shared(tiles);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp / 2 * 64, warp_column = warp % 2 * 64;
    a += (size_t)blockIdx.y * BM * k;
    b += blockIdx.x * BN;
    float sums[4][8][4] = {};

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s * BK < k) fill(base + s * STAGE_BYTES, a, b, n, k, s * BK);
        asm volatile("cp.async.commit_group;");
    }
    int stage = 0, next = STAGES - 1;
    for (int k0 = 0; k0 < k; k0 += BK) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        int ahead = k0 + (STAGES - 1) * BK;
        if (ahead < k) fill(base + next * STAGE_BYTES, a, b, n, k, ahead);
        asm volatile("cp.async.commit_group;");
        unsigned tile_a = base + stage * STAGE_BYTES, tile_b = tile_a + A_BYTES;
#pragma unroll
        for (int kk = 0; kk < BK; kk += 16) {
            unsigned x[4][4], y[8][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned at = tile_a + a_place(warp_row + 16 * i + lane % 16, kk / 8 + lane / 16);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3]) : "r"(at));
            }
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                unsigned at = tile_b + b_place(kk + lane % 16, warp_column / 8 + j + lane / 16);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(y[j][0]), "=r"(y[j][1]), "=r"(y[j + 1][0]), "=r"(y[j + 1][1]) : "r"(at));
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float* s = sums[i][j];
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                                 : "r"(x[i][0]), "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3]), "r"(y[j][0]), "r"(y[j][1]));
                }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = blockIdx.y * BM + warp_row + 16 * i + 8 * half + lane / 4;
                int column = blockIdx.x * BN + warp_column + 8 * j + lane % 4 * 2;
                unsigned pair;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sums[i][j][2 * half + 1]), "f"(sums[i][j][2 * half]));
                *(unsigned*)(c + (size_t)row * n + column) = pair;
            }
}
