/* bcryptprimitives.dll, which Wine 8 lacks: Go's runtime calls ProcessPrng when it starts. */
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG); /* RtlGenRandom of advapi32 */

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE buf, SIZE_T n) {
	while (n > 0) {
		ULONG k = n > 0x10000 ? 0x10000 : (ULONG)n;
		if (!SystemFunction036(buf, k)) return FALSE;
		buf += k;
		n -= k;
	}
	return TRUE;
}
