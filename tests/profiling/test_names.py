"""What names of kernels say, as the libraries spell them."""

import pytest

from overlap1f1b.profiling.names import Role, role_of, shortened

EXCHANGES = [
    "void AllReduceKernel<256, 8, FuncSum<float>, float>(KernelArgs<float>)",  # NCCL 1
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",  # 2.4
    "ncclSendRecvKernel_copy_i8(ncclWorkElem)",  # 2.7
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",  # 2.12
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",  # 2.19
    "ncclSymDevKernel_AllGather_ST(ncclSymDevArgs)",  # 2.27
    "ncclSymkDevKernel_ReduceScatter_LL_sum_f32(ncclSymkDevWorkArgsStorage<4096ul>)",  # 2.28
    "nccl_ep_jit_ht_dispatch_kernel",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>) [clone .kd]",  # RCCL
    "_Z42ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_tP11ncclDevCommmP8ncclWork",
    "mscclKernel_Sum_hip_bfloat16_Simple_false",
    "void mscclpp::executionKernel<__half, mscclpp::LL16Packet>(int, __half*, __half*)",
    "allreduce7(mscclpp::SmChannelDeviceHandle*, float*, float*, void*, int, int, unsigned long)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)",
    "void deep_ep::internode_ll::combine<true, 7168, 9, 9>(void*, void*, int*)",
    "void deep_ep::elastic::dispatch_impl<512>(ncclDevComm, ncclWindow_vidmem*)",
    "void hybrid_ep::dispatch_kernel<unsigned short>(hybrid_ep::dispatch_kernel_param_t<unsigned short>)",
    "void uccl::internode::notify_dispatch<false, 2>(int const*, int*)",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs<hip_bfloat16>)",
    "void nvshmemi_reduce_kernel<unsigned char, (rdxn_ops)0>(int, int, int)",
    "void alltoall_on_stream_kernel<int, (threadgroup_t)2>(int, int*, int const*, unsigned long, int)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(c10::BFloat16**)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "Memcpy PtoP (Device -> Device)",
]
COMPUTES = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int, int, int, int)",
    "void deep_ep::elastic::combine_reduce_epilogue_impl<512>(void*)",
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1",
    "triton_poi_fused_add_0",
    "nvjet_tst_64x8_64x16_2x4_h_bz_TNT",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4> >(flash::Flash_fwd_params)",
]


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("exchange", EXCHANGES),
        ("compute", COMPUTES),
        ("copy", ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)", "Memset (Device)"]),
        ("", ["kernel", "my_kernel(float*)", "successclKernel", ""]),
    ],
)
def test_what_a_name_says(role: Role, names: list[str]) -> None:
    assert {name: role_of(name) for name in names} == dict.fromkeys(names, role)


def test_short_names() -> None:
    assert shortened(EXCHANGES[4]) == "ncclDevKernel_SendRecv"
    assert shortened(EXCHANGES[21]) == "two_shot_all_reduce_kernel_inplace"
    assert shortened("void <unnamed>::softmax_warp_forward<float>(T2 *)") == "softmax_warp_forward"
    assert shortened("ncclDevKernel_Generic_1.kd") == "ncclDevKernel_Generic_1"
    assert shortened("") == "a kernel without a name"
