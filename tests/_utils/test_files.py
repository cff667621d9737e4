"""Files that are replaced at once. Folders that are removed: tests/checkpoint/test_folder.py."""

from dpfunc._utils.files import replace_file


def test_a_file_is_not_written_through_a_link(tmp_path):
    """A link in the place of the new file led out of the folder; one to nothing was not seen as there."""
    for target in (tmp_path / "elsewhere", tmp_path / "known"):
        (tmp_path / "known").write_text("mine")
        (tmp_path / "file.new").symlink_to(target)
        replace_file(tmp_path / "file", "text")
        assert (tmp_path / "file").read_text() == "text"
        assert not (tmp_path / "elsewhere").exists()
        assert (tmp_path / "known").read_text() == "mine"
