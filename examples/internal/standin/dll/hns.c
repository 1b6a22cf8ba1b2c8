/* The functions of computenetwork.dll and vmcompute.dll that hnslib calls. Each one sends its
 * name and arguments to the server at %HNS_STANDIN% (address:port), and returns its answer:
 *   request  "FUNCTION GUID LENGTH\n" and LENGTH bytes of UTF-8
 *   answer   "HRESULT GUID LENGTH\n", with blanks before LENGTH up to HEAD bytes, and LENGTH bytes:
 *            the properties or, after a failure, the text of the error
 * Wine takes long for each send and recv, so there are few of them. Without a server every call fails as if the service did not run. */
#include <winsock2.h>
#include <ws2tcpip.h>
#include <objbase.h>
#include <stdio.h>
#include <stdlib.h>

#define NOT_RUNNING ((HRESULT)0x800706b5) /* RPC_S_UNKNOWN_IF */

/* HEAD is the length of the first line of an answer. */
#define HEAD 64

static CRITICAL_SECTION lock;
static SOCKET server = INVALID_SOCKET;

static char *utf8(const WCHAR *w, int *len) {
	*len = w ? WideCharToMultiByte(CP_UTF8, 0, w, -1, NULL, 0, NULL, NULL) - 1 : 0;
	char *s = malloc(*len + 1);
	if (*len) WideCharToMultiByte(CP_UTF8, 0, w, -1, s, *len + 1, NULL, NULL);
	return s;
}

/* wide returns text that the caller frees with CoTaskMemFree. */
static WCHAR *wide(const char *s, int len) {
	int n = MultiByteToWideChar(CP_UTF8, 0, s, len, NULL, 0);
	WCHAR *w = CoTaskMemAlloc((n + 1) * sizeof(WCHAR));
	MultiByteToWideChar(CP_UTF8, 0, s, len, w, n);
	w[n] = 0;
	return w;
}

static int dial(void) {
	char at[80], *port;
	struct sockaddr_in a = {.sin_family = AF_INET};
	BOOL yes = TRUE;
	if (!GetEnvironmentVariableA("HNS_STANDIN", at, sizeof at) || !(port = strrchr(at, ':'))) return 0;
	*port++ = 0;
	a.sin_addr.s_addr = inet_addr(at);
	a.sin_port = htons((u_short)atoi(port));
	server = socket(AF_INET, SOCK_STREAM, 0);
	if (server != INVALID_SOCKET && !connect(server, (struct sockaddr *)&a, sizeof a)) {
		setsockopt(server, IPPROTO_TCP, TCP_NODELAY, (char *)&yes, sizeof yes);
		return 1;
	}
	return 0;
}

static int sendall(const char *p, int n) {
	for (int k; n > 0; p += k, n -= k)
		if ((k = send(server, p, n, 0)) <= 0) return 0;
	return 1;
}

/* receive reads an answer: its head, and text that the caller frees. */
static int receive(char *head, char **text, int *n) {
	char buf[16384];
	int have = 0, k;
	for (; have < HEAD; have += k)
		if ((k = recv(server, buf + have, sizeof buf - have, 0)) <= 0) return 0;
	memcpy(head, buf, HEAD);
	head[HEAD - 1] = 0;
	if (sscanf(head, "%*x %*s %d", n) != 1 || *n < have - HEAD) return 0;
	*text = malloc(*n + 1);
	memcpy(*text, buf + HEAD, have - HEAD);
	for (have -= HEAD; have < *n; have += k)
		if ((k = recv(server, *text + have, *n - have, 0)) <= 0) return 0;
	return 1;
}

static void guidtext(const GUID *g, char *s) {
	sprintf(s, "%08lx-%04x-%04x-%02x%02x-%02x%02x%02x%02x%02x%02x", (unsigned long)g->Data1, g->Data2, g->Data3, g->Data4[0],
		g->Data4[1], g->Data4[2], g->Data4[3], g->Data4[4], g->Data4[5], g->Data4[6], g->Data4[7]);
}

static void textguid(const char *s, GUID *g) {
	unsigned d[11] = {0};
	sscanf(s, "%8x-%4x-%4x-%2x%2x-%2x%2x%2x%2x%2x%2x", d, d + 1, d + 2, d + 3, d + 4, d + 5, d + 6, d + 7, d + 8, d + 9, d + 10);
	g->Data1 = d[0], g->Data2 = d[1], g->Data3 = d[2];
	for (int i = 0; i < 8; i++) g->Data4[i] = d[3 + i];
}

/* call asks the server. id is the object's GUID or NULL, made receives a new object's GUID. */
static HRESULT call(const char *fn, const GUID *id, const WCHAR *arg, GUID *made, WCHAR **props, WCHAR **error) {
	char g[40] = "-", head[HEAD], *text = NULL;
	int len, n = 0, ok = 0;
	char *body = utf8(arg, &len), *request = malloc(len + 200);
	if (id) guidtext(id, g);
	int at = sprintf(request, "%s %s %d\n", fn, g, len);
	memcpy(request + at, body, len);
	if (error) *error = NULL;
	EnterCriticalSection(&lock);
	for (int attempt = 0; attempt < 2 && !ok; attempt++) {
		ok = (server != INVALID_SOCKET || dial()) && sendall(request, at + len) && receive(head, &text, &n);
		if (!ok) {
			closesocket(server);
			server = INVALID_SOCKET;
			free(text);
			text = NULL;
		}
	}
	LeaveCriticalSection(&lock);
	free(body);
	free(request);
	if (!ok) return NOT_RUNNING;
	HRESULT hr = (HRESULT)strtoul(head, NULL, 16);
	if (hr == S_OK && made) textguid(strchr(head, ' ') + 1, made);
	if (hr == S_OK && props) *props = wide(text, n);
	if (hr != S_OK && error && n) *error = wide(text, n);
	free(text);
	return hr;
}

static HRESULT opened(HRESULT hr, const GUID *id, void **h) {
	if (hr == S_OK) {
		*h = malloc(sizeof(GUID));
		*(GUID *)*h = *id;
	}
	return hr;
}

#define API __declspec(dllexport) HRESULT WINAPI
#define KIND(N, P) \
	API HcnEnumerate##P(const WCHAR *q, WCHAR **ids, WCHAR **r) { return call("HcnEnumerate" #P, NULL, q, NULL, ids, r); } \
	API HcnOpen##N(const GUID *id, void **h, WCHAR **r) { return opened(call("HcnOpen" #N, id, NULL, NULL, NULL, r), id, h); } \
	API HcnModify##N(void *h, const WCHAR *s, WCHAR **r) { return call("HcnModify" #N, h, s, NULL, NULL, r); } \
	API HcnQuery##N##Properties(void *h, const WCHAR *q, WCHAR **p, WCHAR **r) { return call("HcnQuery" #N "Properties", h, q, NULL, p, r); } \
	API HcnDelete##N(const GUID *id, WCHAR **r) { return call("HcnDelete" #N, id, NULL, NULL, NULL, r); } \
	API HcnClose##N(void *h) { free(h); return S_OK; }

KIND(Network, Networks)
KIND(Endpoint, Endpoints)
KIND(LoadBalancer, LoadBalancers)
API HcnCreateEndpoint(void *network, GUID *id, const WCHAR *s, void **h, WCHAR **r) {
	return opened(call("HcnCreateEndpoint", network, s, id, NULL, r), id, h);
}
API HcnCreateLoadBalancer(GUID *id, const WCHAR *s, void **h, WCHAR **r) {
	return opened(call("HcnCreateLoadBalancer", NULL, s, id, NULL, r), id, h);
}
/* HNSCall is the first version of the interface, which knows the version of the service. */
API HNSCall(const WCHAR *method, const WCHAR *path, const WCHAR *object, WCHAR **response) {
	return call("HNSCall", NULL, path, NULL, response, NULL);
}

BOOL WINAPI DllMain(HINSTANCE h, DWORD why, LPVOID x) {
	if (why == DLL_PROCESS_ATTACH) {
		WSADATA d;
		InitializeCriticalSection(&lock);
		WSAStartup(MAKEWORD(2, 2), &d);
	}
	return TRUE;
}
