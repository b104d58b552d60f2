/* Values that several types return: ids, lists of numbers, columns of messages. */
#include "types.h"

/* Eight digits at once, one in each byte: spread the nibbles, then add '0', and 'a' - '9' - 1 to
 * those above 9. */
static void hex_half(uint32_t half, char *text)
{
	uint64_t x = half, letters;

	x = (x << 16 | x) & UINT64_C(0x0000ffff0000ffff);
	x = (x << 8 | x) & UINT64_C(0x00ff00ff00ff00ff);
	x = (x << 4 | x) & UINT64_C(0x0f0f0f0f0f0f0f0f);
	letters = (x + UINT64_C(0x0606060606060606)) >> 4 & UINT64_C(0x0101010101010101);
	x += UINT64_C(0x3030303030303030) + letters * ('a' - '9' - 1);
	for (int i = 0; i < 8; i++)
		text[i] = (char)(x >> (56 - 8 * i));
}

void id_hex(uint64_t id, char *text)
{
	hex_half((uint32_t)(id >> 32), text);
	hex_half((uint32_t)id, text + 8);
}

PyObject *id_str(uint64_t id)
{
	char text[16];

	id_hex(id, text);
	return PyUnicode_FromStringAndSize(text, sizeof(text));
}

PyObject *list_of(uint32_t count, PyObject *(*item)(const void *array, uint32_t i),
                  const void *array)
{
	PyObject *list = PyList_New((Py_ssize_t)count);

	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *object = item(array, i);

		if (!object || PyList_SetItem(list, (Py_ssize_t)i, object) < 0)
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *number_item(const void *numbers, uint32_t i)
{
	return PyLong_FromUnsignedLong(((const uint32_t *)numbers)[i]);
}

PyObject *list_of_numbers(const uint32_t *numbers, uint32_t count)
{
	return list_of(count, number_item, numbers);
}

int columns_new(columns *self, uint32_t count, uint64_t data_bytes)
{
	const size_t bytes_of[COLUMNS] = {
		[COLUMN_IDS] = count * sizeof(*self->at.ids),
		[COLUMN_TIMESTAMPS] = count * sizeof(*self->at.timestamps),
		[COLUMN_ATTEMPTS] = count * sizeof(*self->at.attempts),
		[COLUMN_OFFSETS] = (count + (size_t)1) * sizeof(*self->at.offsets),
		[COLUMN_DATA] = (size_t)data_bytes,
	};
	void *start[COLUMNS];

	*self = (columns){0};
	for (int i = 0; i < COLUMNS; i++) {
		self->bytes[i] = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes_of[i]);
		if (!self->bytes[i]) {
			columns_free(self);
			return -1;
		}
		start[i] = PyBytes_AsString(self->bytes[i]);
	}
	self->at = (shmq_columns){.ids = start[COLUMN_IDS],
	                          .timestamps = start[COLUMN_TIMESTAMPS],
	                          .attempts = start[COLUMN_ATTEMPTS],
	                          .offsets = start[COLUMN_OFFSETS],
	                          .data = start[COLUMN_DATA]};
	return 0;
}

int columns_shorten(columns *self, uint32_t count)
{
	Py_ssize_t used = self->at.offsets[count];
	PyObject *shorter;

	if (used == PyBytes_Size(self->bytes[COLUMN_DATA]))
		return 0;
	shorter = PyBytes_FromStringAndSize((const char *)self->at.data, used);
	if (!shorter)
		return -1;
	Py_DECREF(self->bytes[COLUMN_DATA]);
	self->bytes[COLUMN_DATA] = shorter;
	self->at.data = (uint8_t *)PyBytes_AsString(shorter);
	return 0;
}

void columns_free(columns *self)
{
	for (int i = 0; i < COLUMNS; i++)
		Py_CLEAR(self->bytes[i]);
}
