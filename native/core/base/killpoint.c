#include "base/killpoint.h"

#ifdef SHMQ_KILLPOINTS
#include "shmq.h"

#include <signal.h>
#include <string.h>

static char armed[64];
static uint32_t left;

void shmq_killpoint_arm(const char *name, uint32_t count)
{
	left = 0;
	if (!name)
		return;
	strncpy(armed, name, sizeof(armed) - 1);
	left = count;
}

void shmq_killpoint_pass(const char *name)
{
	if (left && !strcmp(name, armed) && !--left)
		raise(SIGKILL);
}
#else
typedef int shmq_killpoint_unused;
#endif
