package apilist

import (
	"errors"
	"io"
	"strings"
	"testing"
)

type object struct{ Name string }

// What is read has been handed on before the next object has come.
func TestAListIsReadOneObjectAfterTheOther(t *testing.T) {
	body, server := io.Pipe()
	names := make(chan string)
	write := func(s string) {
		if _, err := io.WriteString(server, s); err != nil {
			t.Error(err)
		}
	}
	go func() {
		write(`{"kind":"List","metadata":{"resourceVersion":"7"},"items":[`)
		for i, one := range []string{`{"name":"a"}`, `{"name":"b"}`} {
			if i > 0 {
				write(",")
			}
			write(one + " ")
			if want := one[9:10]; want != <-names {
				t.Errorf("not %s", want)
			}
		}
		write("]}")
		server.Close()
	}()
	version, err := Read(body, func(o *object) error {
		names <- o.Name
		return nil
	})
	if version != "7" || err != nil {
		t.Errorf("version %q, %v", version, err)
	}
}

func TestAnEmptyListIsNoError(t *testing.T) {
	for _, items := range []string{"[]", "null"} {
		version, err := Read(strings.NewReader(`{"items":`+items+`,"metadata":{"resourceVersion":"7"}}`),
			func(*object) error { return errors.New("an object") })
		if version != "7" || err != nil {
			t.Errorf("%s: version %q, %v", items, version, err)
		}
	}
}

func TestAListThatIsRefusedHalfwayIsAnError(t *testing.T) {
	body, server := io.Pipe()
	go func() {
		io.WriteString(server, `{"metadata":{"resourceVersion":"7"},"items":[{"name":"a"},{"name":"b"}]}`)
		server.Close()
	}()
	refused := errors.New("refused")
	if _, err := Read(body, func(*object) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("error %v", err)
	}
}
