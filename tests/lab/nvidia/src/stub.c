/* The libcuda.so of the toolkit's lib64/stubs: there to link against, every call answers 34. */
#define STUB(name) __attribute__((visibility("default"))) int name(void) { return 34; }
STUB(cuInit) STUB(cuDriverGetVersion) STUB(cuDeviceGetCount) STUB(cuDeviceGet) STUB(cuDeviceGetName)
STUB(cuDeviceTotalMem_v2) STUB(cuDeviceGetPCIBusId) STUB(cuDeviceGetUuid) STUB(cuDeviceGetAttribute)
STUB(cuDevicePrimaryCtxRetain) STUB(cuDevicePrimaryCtxRelease_v2) STUB(cuDevicePrimaryCtxRelease)
STUB(cuCtxCreate_v2) STUB(cuCtxDestroy_v2) STUB(cuCtxSetCurrent) STUB(cuCtxGetCurrent) STUB(cuMemAlloc_v2)
STUB(cuMemFree_v2) STUB(cuMemGetInfo_v2) STUB(cuGetErrorName) STUB(cuGetErrorString)
