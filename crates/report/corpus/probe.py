import pytest, os
def test_ok(): pass
def test_fail(): assert 1 == 2, "boom"
@pytest.mark.skip(reason="no")
def test_skip(): pass
@pytest.mark.xfail(reason="known")
def test_xf(): assert 0
@pytest.mark.xfail(reason="known")
def test_xp(): pass
@pytest.mark.xfail(strict=True, reason="knowns")
def test_xps(): pass
@pytest.fixture
def td():
    yield
    raise RuntimeError("td")
def test_td(td): pass
def test_td_fail(td): assert 0
@pytest.fixture
def su(): raise RuntimeError("su\x1b[31m\x00\udc80")
def test_su(su): pass
@pytest.mark.parametrize("x",[1,"a b","é","\x1b"])
def test_p(x): pass
class TestC:
    def test_m(self, subtests=None): pass
def test_sub(subtests):
    for i in range(3):
        with subtests.test(i=i): assert i != 1
def test_xfail_imp(): pytest.xfail("imp")
