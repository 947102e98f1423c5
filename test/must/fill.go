package must

import (
	"fmt"
	"reflect"
	"testing"
	"time"
)

// Fill gives every field of what v points to a value made of n, lists two elements, maps one. A test that fills an
// object notices a field that somebody adds to it.
func Fill(t testing.TB, v any, n int) {
	t.Helper()
	fill(t, reflect.ValueOf(v).Elem(), n)
}

func fill(t testing.TB, v reflect.Value, n int) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("%s-%d", v.Type().Name(), n))
	case reflect.Bool:
		v.SetBool(n%2 == 1)
	case reflect.Int32, reflect.Int64, reflect.Int:
		v.SetInt(int64(n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(t, v.Index(0), n)
		fill(t, v.Index(1), n+2)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key, n)
		fill(t, value, n)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(int64(n)*3600, 0)))
			return
		}
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	default:
		t.Fatalf("cannot fill a %s", v.Type())
	}
}
