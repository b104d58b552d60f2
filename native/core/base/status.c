#include "base/status.h"

#include "shmq.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char why[256];

const char *shmq_status_name(int status)
{
	switch (status) {
#define X(name, value, exception, sentence)                                                        \
	case value:                                                                                    \
		return #name;
		SHMQ_STATUS_TABLE(X)
#undef X
	}
	return "UNKNOWN";
}

const char *shmq_status_sentence(int status)
{
	switch (status) {
#define X(name, value, exception, sentence)                                                        \
	case value:                                                                                    \
		return sentence;
		SHMQ_STATUS_TABLE(X)
#undef X
	}
	return "unknown status";
}

const char *shmq_error_detail(void)
{
	return why;
}

int fail(int status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	return status;
}

void error_clear(void)
{
	why[0] = 0;
}
